"""The demo: a small network is trained on a few local peers while one of them is killed and another joins."""

"""sync_state on the client's side: what it takes, what is compared, what is fetched."""

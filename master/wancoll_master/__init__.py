"""wancoll_master: tracks membership, decides commit and abort."""

"""`octavo admin`: commands of operators for a running server, one file each."""

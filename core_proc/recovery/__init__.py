"""What becomes of requests when their workers die: the workers are started again, and the requests go on."""

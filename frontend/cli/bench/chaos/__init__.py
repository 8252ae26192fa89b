"""`octavo bench chaos`: many clients of one engine whose processes are killed and stopped, and what came of it."""

"""`octavo bench chaos`: load on an engine whose processes are killed and stopped, with every answer checked."""

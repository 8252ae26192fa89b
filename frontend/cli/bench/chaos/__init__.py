"""`octavo bench chaos`: puts load on an engine, kills and stops its processes, and checks every response."""

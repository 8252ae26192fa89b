"""The public API as msgspec structs: requests and responses."""

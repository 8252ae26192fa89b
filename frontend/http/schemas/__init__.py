"""The public API as msgspec structs: what requests may hold and what responses do."""

"""`octavo quantize`: quantizes checkpoints, for octavo and other engines. Serves no requests."""

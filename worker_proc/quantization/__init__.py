"""`octavo quantize`: quantizes checkpoints, for octavo and other engines to load. Serves nothing."""

"""Steps as recorded programs of native operations: what a CPU computes with."""

"""Steps as recorded programs of native operations: the default runner on a CPU."""

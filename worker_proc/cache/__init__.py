"""Memory of keys, values and recurrent states: on the device, in host memory, and in files."""

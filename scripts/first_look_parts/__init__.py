"""The parts of scripts/gpu_first_look: cells, the processes that measure them, and the report."""

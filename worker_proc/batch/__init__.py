"""The persistent batch: one row per running request, and the arrays of a step that are made from the rows."""

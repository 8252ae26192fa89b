"""The rows that a pipeline stage passes to the next one, through memory that both share."""

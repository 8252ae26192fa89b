"""Division of a model between ranks, applied from outside of the models' files."""

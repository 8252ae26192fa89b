"""How a model is divided between ranks, applied from outside of the models' files."""

"""From outputs of the client to the public JSON. Pure functions: no IO."""

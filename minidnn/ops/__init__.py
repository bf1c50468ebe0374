"""The computations that graphs name, once per kind of device: the same names, the same contract."""

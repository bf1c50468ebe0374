"""Devices: the narrow interface between a schedule and a machine. A new device is one file."""

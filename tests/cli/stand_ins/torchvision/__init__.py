"""A stand-in: what the documentation asks torchvision for, with weights that come from no network."""

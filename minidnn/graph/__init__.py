"""The task and data flow graph (TDFG) of one training iteration: tensors, ops, and how a network becomes both."""

"""The only home of ONNX Runtime: what a model folder says, and the session that runs its graph."""

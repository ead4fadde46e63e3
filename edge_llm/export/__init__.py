"""From a GGUF file to a model folder that the runtime maps and runs: the only home of the onnx package."""

"""ONNX: our networks as graphs, and the engine that runs them without torch."""

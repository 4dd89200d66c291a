"""`inferq profile`: where the time of a model's runs goes, by operator and by node, from ONNX Runtime's own profile."""

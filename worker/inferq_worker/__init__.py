"""The inferq worker: consume, decode, admit, schedule, infer, publish, settle."""

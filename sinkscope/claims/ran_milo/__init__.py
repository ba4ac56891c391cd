"""Claims of Ran-Milo 2603.11487: sinks are necessary where a softmax has to do nothing, and of its readers."""

"""The trigger-conditional task (Ran-Milo 2603.11487): its data, its models, their training, what they show of sinks."""

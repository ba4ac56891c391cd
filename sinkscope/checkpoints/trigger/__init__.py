"""The trigger-conditional task (Ran-Milo 2603.11487) as an ordinary checkpoint: configuration, model, data."""

"""The trigger-conditional task (Ran-Milo 2603.11487): model, data, training, evaluation, figures and screens."""

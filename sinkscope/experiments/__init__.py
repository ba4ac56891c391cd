"""Other questions asked of a model: what ablation costs, what a scan costs, the trigger task, one head's map."""

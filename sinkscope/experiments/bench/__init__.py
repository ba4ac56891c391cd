"""What a scan costs on this machine, beside the passes it stands for."""

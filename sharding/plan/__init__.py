"""What a configuration will cost, asked before any accelerator is there."""

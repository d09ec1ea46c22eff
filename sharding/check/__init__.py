"""The library's own check of the machine that it runs on."""

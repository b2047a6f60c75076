"""Scripts and experiments on top of `hf_autonorm`; start at train.py."""

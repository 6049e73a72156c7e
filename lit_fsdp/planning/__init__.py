"""What a step will take, and which settings fit, before there is a GPU.

``plan`` and ``fsdp2_auto`` start from ``plan.py`` and ``search/``. Two engines say what a step holds and does: the
closed form counts it from the modules, the exact trace follows it on tensors without values. ``timing/`` makes
seconds of that. Nothing is imported here, as a run needs few of these files.
"""

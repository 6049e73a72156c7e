"""Lightning's side of sharding.

``fsdp2`` is the strategy, ``precision_plugin`` its dtypes and clipping, ``launcher`` and ``processes`` the ranks of a
run, ``signals`` what asks it to end. The public name is ``lit_fsdp.FSDP2Strategy``: handed on here, it would cost those
who only count processes the import of torch.
"""

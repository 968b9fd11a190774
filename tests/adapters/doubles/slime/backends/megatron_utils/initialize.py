"""Megatron's set-up, of which only the hook at its end is here."""

from slime.utils.misc import load_function


def init(args):
    if args.custom_megatron_init_path:
        load_function(args.custom_megatron_init_path)(args)

"""What is measured of the library, in a checkout: none of this is in the wheel.

python -m benchmarks bench, sweep, plot     the commands (``commands.py``), from the top of the checkout
python -m benchmarks.bench                  the first of them with torch alone installed
python benchmarks/NAME.py                   one question each; README.md lists them
"""

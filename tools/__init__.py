"""Commands for runs and models:  python -m tools.NAME"""

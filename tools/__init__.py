"""Commands around training: python -m tools.NAME"""

"""Which attention should I use?  python -m tools.compare attention=gqa,mha,mla seed=0,1,2"""

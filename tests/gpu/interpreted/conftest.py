from interpreter import call_directly

call_directly()

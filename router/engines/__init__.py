"""Other OpenAI-compatible servers (vLLM, SGLang, llama.cpp) as workers behind this router."""

"""C declarations of what is called of the stock libraries directly: ggml's devices, the vocabulary."""

from __future__ import annotations

from typing import Final

STOCK_CDEF: Final = """
void * llama_model_get_vocab(void * model);

size_t ggml_backend_reg_count(void);
void ggml_backend_load_all_from_path(const char * path);

size_t ggml_backend_dev_count(void);
void * ggml_backend_dev_get(size_t index);
void * ggml_backend_dev_by_type(int type);
int ggml_backend_dev_type(void * device);
const char * ggml_backend_dev_description(void * device);
void ggml_backend_dev_memory(void * device, size_t * free, size_t * total);
void * ggml_backend_dev_host_buffer_type(void * device);

const char * ggml_backend_buft_name(void * buft);
void * ggml_backend_buft_alloc_buffer(void * buft, size_t size);
void * ggml_backend_buffer_get_base(void * buffer);
void ggml_backend_buffer_free(void * buffer);
"""

// Hashes a chain of blocks in one call, and packs token ids into bytes: gives the same results as protocol/digest.py.
//
// It has its own BLAKE2b (RFC 7693): OpenSSL's has no personal string, and hashlib's has no C interface.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if PY_BIG_ENDIAN
#error "written for little-endian processors: on others protocol/digest.py hashes in Python"
#endif

enum { DIGEST_BYTES = 16, CHUNK_BYTES = 128, TOKEN_BYTES = 4 };

// Above 8,192 tokens (60 us) the GIL is released. Below it is kept, because taking it back may take 5 ms.
static const Py_ssize_t LONG_BYTES = 8192 * TOKEN_BYTES;

static const uint8_t PERSON[16] = "tandem.block.v2";

typedef uint64_t Row __attribute__((vector_size(32))); // a row of the 4 x 4 words that BLAKE2b mixes

// The loader picks the best of these versions that the processor can run; other platforms get a single version.
#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

INLINE uint64_t load_word(const uint8_t *bytes) {
  uint64_t word;
  memcpy(&word, bytes, sizeof word);
  return word;
}

#define IV_LOW ((Row){0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b, 0xa54ff53a5f1d36f1})
#define IV_HIGH ((Row){0x510e527fade682d1, 0x9b05688c2b3e6c1f, 0x1f83d9abfb41bd6b, 0x5be0cd19137e2179})
#define ROTATE(row, num_bits) ((row) >> (num_bits) | (row) << (64 - (num_bits)))
#define SHIFT(row, i, j, k, l) __builtin_shufflevector(row, row, i, j, k, l)
#define WORD(i) load_word(chunk + 8 * (i))
#define WORDS(i, j, k, l) ((Row){WORD(i), WORD(j), WORD(k), WORD(l)})

// Mixes all four columns.
#define MIX(x, y)                                                                                                      \
  do {                                                                                                                 \
    a += x;                                                                                                            \
    a += b;                                                                                                            \
    d = ROTATE(d ^ a, 32);                                                                                             \
    c += d;                                                                                                            \
    b = ROTATE(b ^ c, 24);                                                                                             \
    a += y;                                                                                                            \
    a += b;                                                                                                            \
    d = ROTATE(d ^ a, 16);                                                                                             \
    c += d;                                                                                                            \
    b = ROTATE(b ^ c, 63);                                                                                             \
  } while (0)

// Mixes columns, then diagonals, which become columns when rows are shifted: all rows but `b`, which is known last.
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15)                                    \
  do {                                                                                                                 \
    MIX(WORDS(s0, s2, s4, s6), WORDS(s1, s3, s5, s7));                                                                 \
    a = SHIFT(a, 3, 0, 1, 2);                                                                                          \
    d = SHIFT(d, 2, 3, 0, 1);                                                                                          \
    c = SHIFT(c, 1, 2, 3, 0);                                                                                          \
    MIX(WORDS(s14, s8, s10, s12), WORDS(s15, s9, s11, s13));                                                           \
    a = SHIFT(a, 1, 2, 3, 0);                                                                                          \
    d = SHIFT(d, 2, 3, 0, 1);                                                                                          \
    c = SHIFT(c, 3, 0, 1, 2);                                                                                          \
  } while (0)

// Adds CHUNK_BYTES to the state. `num_bytes` counts the message up to the end of these bytes.
INLINE void compress(Row state[2], const uint8_t *chunk, uint64_t num_bytes, int is_last) {
  Row a = state[0], b = state[1], c = IV_LOW, d = IV_HIGH ^ (Row){num_bytes, 0, is_last ? ~(uint64_t)0 : 0, 0};
  ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
  ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
  ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
  ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
  ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
  ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
  ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
  ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
  ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
  ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
  state[0] ^= a ^ c;
  state[1] ^= b ^ d;
}

// BLAKE2b with the personal string PERSON. The message is not empty and is padded with zeros to whole chunks.
INLINE void hash(uint8_t digest[DIGEST_BYTES], const uint8_t *message, size_t num_bytes) {
  Row state[2] = {IV_LOW ^ (Row){0x01010000 | DIGEST_BYTES, 0, 0, 0},
                  IV_HIGH ^ (Row){0, 0, load_word(PERSON), load_word(PERSON + 8)}};
  size_t start = 0;
  for (; num_bytes - start > CHUNK_BYTES; start += CHUNK_BYTES) {
    compress(state, message + start, start + CHUNK_BYTES, 0);
  }
  compress(state, message + start, num_bytes, 1);
  memcpy(digest, &state[0], DIGEST_BYTES);
}

// Digest of each block: hash of the previous digest (or `parent`) and the block's bytes. `message` buffers both.
FOR_EACH_PROCESSOR
static void hash_chain(uint8_t *digests, const Py_buffer *parent, const uint8_t *blocks, size_t num_blocks,
                       size_t block_bytes, uint8_t *message) {
  const uint8_t *before = parent->buf;
  size_t before_bytes = (size_t)parent->len;
  for (size_t i = 0; i < num_blocks; ++i) {
    size_t num_bytes = before_bytes + block_bytes;
    memcpy(message, before, before_bytes);
    memcpy(message + before_bytes, blocks + i * block_bytes, block_bytes);
    memset(message + num_bytes, 0, (CHUNK_BYTES - num_bytes % CHUNK_BYTES) % CHUNK_BYTES);
    hash(digests + i * DIGEST_BYTES, message, num_bytes);
    before = digests + i * DIGEST_BYTES;
    before_bytes = DIGEST_BYTES;
  }
}

static PyObject *list_of_digests(const uint8_t *digests, Py_ssize_t num_blocks) {
  PyObject *list = PyList_New(num_blocks);
  for (Py_ssize_t i = 0; list != NULL && i < num_blocks; ++i) {
    PyObject *digest = PyBytes_FromStringAndSize((const char *)digests + i * DIGEST_BYTES, DIGEST_BYTES);
    if (digest == NULL) {
      Py_CLEAR(list);
    } else {
      PyList_SET_ITEM(list, i, digest);
    }
  }
  return list;
}

static PyObject *chain_of(const Py_buffer *parent, const Py_buffer *data, Py_ssize_t block_bytes) {
  if (block_bytes <= 0 || data->len % block_bytes != 0) {
    return PyErr_Format(PyExc_ValueError, "%zd bytes are not blocks of %zd", data->len, block_bytes);
  }
  Py_ssize_t num_blocks = data->len / block_bytes;
  if (num_blocks == 0) return PyList_New(0);
  size_t message_bytes = (size_t)parent->len + DIGEST_BYTES + (size_t)block_bytes + CHUNK_BYTES;
  uint8_t *digests = PyMem_RawMalloc((size_t)num_blocks * DIGEST_BYTES + message_bytes);
  if (digests == NULL) return PyErr_NoMemory();
  PyThreadState *released = data->len > LONG_BYTES ? PyEval_SaveThread() : NULL;
  hash_chain(digests, parent, data->buf, (size_t)num_blocks, (size_t)block_bytes, digests + num_blocks * DIGEST_BYTES);
  if (released != NULL) PyEval_RestoreThread(released);
  PyObject *list = list_of_digests(digests, num_blocks);
  PyMem_RawFree(digests);
  return list;
}

static PyObject *chain_digests(PyObject *module, PyObject *args) {
  (void)module;
  Py_buffer parent, data;
  Py_ssize_t block_bytes;
  if (!PyArg_ParseTuple(args, "y*y*n:chain_digests", &parent, &data, &block_bytes)) return NULL;
  PyObject *digests = chain_of(&parent, &data, block_bytes);
  PyBuffer_Release(&parent);
  PyBuffer_Release(&data);
  return digests;
}

// The value of an int that is stored in one digit, else 0. Calling PyLong_AsUnsignedLong would take twice as long.
static inline uint32_t small_token(PyObject *token_id) {
#if PY_VERSION_HEX >= 0x030C0000
  PyLongObject *token = (PyLongObject *)token_id;
  Py_ssize_t value = PyUnstable_Long_IsCompact(token) ? PyUnstable_Long_CompactValue(token) : 0;
  return value > 0 ? (uint32_t)value : 0;
#else
  return Py_SIZE(token_id) == 1 ? ((PyLongObject *)token_id)->ob_digit[0] : 0;
#endif
}

// Writes a token id. Returns false, with an exception set, if it is not an int of 32 bits. Runs no Python code.
static int store_token(uint8_t *bytes, PyObject *token_id) {
  unsigned long token = PyLong_CheckExact(token_id) ? small_token(token_id) : 0;
  if (token == 0) token = PyLong_AsUnsignedLong(token_id);
  if (token == (unsigned long)-1 && PyErr_Occurred()) return 0;
  if (token > UINT32_MAX) {
    PyErr_Format(PyExc_OverflowError, "token id %lu does not fit into 32 bits", token);
    return 0;
  }
  uint32_t word = (uint32_t)token;
  memcpy(bytes, &word, TOKEN_BYTES);
  return 1;
}

static PyObject *token_bytes(PyObject *module, PyObject *token_ids) {
  (void)module;
  PyObject *sequence = PySequence_Fast(token_ids, "token ids must be a sequence");
  if (sequence == NULL) return NULL;
  Py_ssize_t num_tokens = PySequence_Fast_GET_SIZE(sequence);
  PyObject **items = PySequence_Fast_ITEMS(sequence);
  PyObject *result = PyBytes_FromStringAndSize(NULL, num_tokens * TOKEN_BYTES);
  for (Py_ssize_t i = 0; result != NULL && i < num_tokens; ++i) {
    if (!store_token((uint8_t *)PyBytes_AS_STRING(result) + i * TOKEN_BYTES, items[i])) Py_CLEAR(result);
  }
  Py_DECREF(sequence);
  return result;
}

static PyMethodDef METHODS[] = {
    {"chain_digests", chain_digests, METH_VARARGS, NULL},
    {"token_bytes", token_bytes, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "tandem.protocol._digest", .m_methods = METHODS};

PyMODINIT_FUNC PyInit__digest(void) { return PyModuleDef_Init(&MODULE); }

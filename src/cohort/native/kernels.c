/* The whole library: one translation unit, so that all kernels run on the same threads. */
#include "decode.c"
#include "product.c"
#include "attention.c"
#include "update.c"
#include "recurrent.c"
#include "experts.c"
#include "few_tokens.c"
#include "packed_product.c"

#define CB_TABLE kernels_avx2
#define CB_NAME "avx2"
#include "kernels.h"

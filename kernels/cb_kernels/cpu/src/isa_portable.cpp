#define CB_TABLE kernels_portable
#define CB_NAME "portable"
#include "kernels.h"

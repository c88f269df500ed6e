/* A certificate that signs itself, and its key: of tests alone, and good for nothing else. */
#ifndef WC_TESTS_CERTIFICATE_H
#define WC_TESTS_CERTIFICATE_H

static const char TEST_CERTIFICATE[] =
    "-----BEGIN CERTIFICATE-----\n"
    "MIHSMIGFoAMCAQICAQEwBQYDK2VwMBIxEDAOBgNVBAMMB3dhbmNvbGwwIBcNNzAw\n"
    "MTAxMDAwMDAwWhgPOTk5OTEyMzEwMDAwMDBaMBIxEDAOBgNVBAMMB3dhbmNvbGww\n"
    "KjAFBgMrZXADIQBlyX58qjag9XFtRZAlcf5M4vZWov2oN2IEf2KBmZVnsDAFBgMr\n"
    "ZXADQQBdp9dnFuT2tyggnPvNBm9NzcdYW3tEqm7hEcRmhKi2Bc3izRvS2kcPRfiF\n"
    "R8ekfpaBOlPXpARJ3a5OOam5qWgE\n"
    "-----END CERTIFICATE-----\n";

static const char TEST_KEY[] =
    "-----BEGIN PRIVATE KEY-----\n"
    "MC4CAQAwBQYDK2VwBCIEIDQxAEflROGnZnDzGp1Xcv5M48el+aCSEMcULC7eFdK9\n"
    "-----END PRIVATE KEY-----\n";

#endif

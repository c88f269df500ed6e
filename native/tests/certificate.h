/* A certificate that signs itself, and its key: of tests alone, and good for nothing else. */
#ifndef WC_TESTS_CERTIFICATE_H
#define WC_TESTS_CERTIFICATE_H

static const char TEST_CERTIFICATE[] =
    "-----BEGIN CERTIFICATE-----\n"
    "MIIBoTCCAUigAwIBAgITdcIkTwPEt0PAfFR9EHMuzmzu0jAKBggqhkjOPQQDAjAX\n"
    "MRUwEwYDVQQDDAx3YW5jb2xsIHRlc3QwIBcNMjYxMTIzMDA1MTUzWhgPMjEyNjEw\n"
    "MzAwMDUxNTNaMBcxFTATBgNVBAMMDHdhbmNvbGwgdGVzdDBZMBMGByqGSM49AgEG\n"
    "CCqGSM49AwEHA0IABBFOblZ/uBgERgBvTKnmHNbeIk3KpOZF+ePaJpXhWbTvnRdy\n"
    "1AuwPIb2tZNVAAoP8s/H1FUMzm8C7A9RR/9MKYOjcTBvMB0GA1UdDgQWBBQqRJrn\n"
    "Ew13wzmoyF8QydwyTVYuCjAfBgNVHSMEGDAWgBQqRJrnEw13wzmoyF8QydwyTVYu\n"
    "CjAPBgNVHRMBAf8EBTADAQH/MBwGA1UdEQQVMBOGEXdhbmNvbGw6bmFtZS90ZXN0\n"
    "MAoGCCqGSM49BAMCA0cAMEQCIEx1jf0M0kgmseUNPbuWP7mFtI8pJrSt0WW6gRip\n"
    "kuiJAiAddS3eVGlbcGaM/8zixS0g8yTgVILNgXYtC8ijdlgC5g==\n"
    "-----END CERTIFICATE-----\n";

static const char TEST_KEY[] =
    "-----BEGIN PRIVATE KEY-----\n"
    "MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg8QMyGHSLVn3KHqaz\n"
    "ZH0R+fJWHDPxC4UFi+OrXKKIXjmhRANCAAQRTm5Wf7gYBEYAb0yp5hzW3iJNyqTm\n"
    "Rfnj2iaV4Vm0750XctQLsDyG9rWTVQAKD/LPx9RVDM5vAuwPUUf/TCmD\n"
    "-----END PRIVATE KEY-----\n";

#endif

//! Tests of the classes. The expected classes are listed here, one row for each code.

use std::{collections::BTreeSet, time::Duration};

use crate::provider::error_codes::{
    ErrorClass::{
        Auth, Capacity, Ended, Invalid, NotFound, Quota, Throttled, Transient, Unanswered,
    },
    Refused::{All, Market, None, Offering, Type, Zone},
    *,
};

#[rustfmt::skip]
const EXPECTED: &[(&str, ErrorClass, Refused)] = &[
    ("AccessDenied", Auth, None),
    ("AccessDeniedException", Auth, None),
    ("AddressLimitExceeded", Quota, All),
    ("AuthFailure", Auth, None),
    ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", Capacity, Market),
    ("Blocked", Auth, None),
    ("CustomerKeyHasBeenRevoked", Invalid, None),
    ("EC2ThrottledException", Throttled, None),
    ("EncryptedVolumesNotSupported", Capacity, Offering),
    ("ExpiredToken", Auth, None),
    ("ExpiredTokenException", Auth, None),
    ("IdempotentInstanceTerminated", Ended, None),
    ("IdempotentParameterMismatch", Invalid, None),
    ("IncompleteSignature", Auth, None),
    ("IncorrectInstanceState", Transient, None),
    ("InstanceLimitExceeded", Quota, Market),
    ("InsufficientAddressCapacity", Capacity, Zone),
    ("InsufficientCapacity", Capacity, Offering),
    ("InsufficientFreeAddressesInSubnet", Capacity, Zone),
    ("InsufficientHostCapacity", Capacity, Offering),
    ("InsufficientInstanceCapacity", Capacity, Offering),
    ("InsufficientReservedInstanceCapacity", Capacity, Offering),
    ("InsufficientVolumeCapacity", Capacity, Zone),
    ("InternalError", Unanswered, None),
    ("InternalFailure", Unanswered, None),
    ("InternalServerError", Unanswered, None),
    ("InvalidAMIID.Malformed", Invalid, None),
    ("InvalidAMIID.NotFound", Invalid, None),
    ("InvalidAMIID.Unavailable", Invalid, None),
    ("InvalidBlockDeviceMapping", Invalid, None),
    ("InvalidClientTokenId", Auth, None),
    ("InvalidGroup.NotFound", Invalid, None),
    ("InvalidIamInstanceProfileArn.Malformed", Invalid, None),
    ("InvalidInstanceID", NotFound, None),
    ("InvalidInstanceID.Malformed", Invalid, None),
    ("InvalidInstanceID.NotFound", NotFound, None),
    ("InvalidInstanceType", Invalid, None),
    ("InvalidInterface.IpAddressLimitExceeded", Invalid, None),
    ("InvalidKMSKey.InvalidState", Invalid, None),
    ("InvalidKeyPair.NotFound", Invalid, None),
    ("InvalidParameter", Invalid, None),
    ("InvalidParameterCombination", Invalid, Type),
    ("InvalidParameterValue", Invalid, Type),
    ("InvalidSecurityGroupID.NotFound", Invalid, None),
    ("InvalidSnapshot.NotFound", Invalid, None),
    ("InvalidSubnet", Invalid, None),
    ("InvalidSubnetID.NotFound", Invalid, None),
    ("InvalidTagKey.Malformed", Invalid, None),
    ("InvalidUserData.Malformed", Invalid, None),
    ("InvalidVolume.ZoneMismatch", Invalid, None),
    ("MaxIOPSLimitExceeded", Quota, All),
    ("MaxSpotInstanceCountExceeded", Capacity, Refused::Quota),
    ("MissingAuthenticationToken", Auth, None),
    ("MissingParameter", Invalid, None),
    ("NetworkInterfaceLimitExceeded", Quota, All),
    ("OperationNotPermitted", Invalid, None),
    ("OptInRequired", Auth, None),
    ("PendingVerification", Quota, All),
    ("PriorRequestNotComplete", Transient, None),
    ("PrivateIpAddressLimitExceeded", Quota, All),
    ("RequestExpired", Auth, None),
    ("RequestLimitExceeded", Throttled, None),
    ("RequestThrottled", Throttled, None),
    ("RequestThrottledException", Throttled, None),
    ("ResourceCountExceeded", Quota, All),
    ("RouteAlreadyExists", Transient, None),
    ("RouteLimitExceeded", Quota, None),
    ("SecurityGroupLimitExceeded", Invalid, None),
    ("SecurityGroupsPerInstanceLimitExceeded", Invalid, None),
    ("SecurityGroupsPerInterfaceLimitExceeded", Invalid, None),
    ("ServerInternal", Unanswered, None),
    ("ServiceUnavailable", Unanswered, None),
    ("SignatureDoesNotMatch", Auth, None),
    ("SlowDown", Throttled, None),
    ("SpotMaxPriceTooLow", Capacity, Offering),
    ("TagLimitExceeded", Invalid, None),
    ("Throttling", Throttled, None),
    ("ThrottlingException", Throttled, None),
    ("TooManyRequestsException", Throttled, None),
    ("UnauthorizedOperation", Auth, None),
    ("Unavailable", Unanswered, None),
    ("UnfulfillableCapacity", Capacity, Offering),
    ("UnknownParameter", Invalid, None),
    ("UnrecognizedClientException", Auth, None),
    ("Unsupported", Capacity, Offering),
    ("UnsupportedOperation", Invalid, Type),
    ("VPCIdNotSpecified", Invalid, None),
    ("VcpuLimitExceeded", Quota, Refused::Quota),
    ("VolumeLimitExceeded", Quota, All),
    ("VolumeTypeNotAvailableInZone", Capacity, Zone),
];

fn class(failure: Failure) -> (ErrorClass, Refused) {
    classify(&CallError { operation: "RunInstances", failure })
}

fn refused(code: &str) -> Failure {
    Failure::Refused { code: Some(code.into()), message: String::new() }
}

fn failed(code: &str) -> Failure {
    Failure::Failed { code: Some(code.into()), message: String::new() }
}

#[test]
fn every_code_has_its_class_at_any_http_status() {
    for (code, of, offerings) in EXPECTED {
        assert_eq!(class(refused(code)), (*of, *offerings), "{code}");
        assert_eq!(class(failed(code)), (*of, *offerings), "{code}");
    }
    let expected: BTreeSet<_> = EXPECTED.iter().map(|(code, ..)| *code).collect();
    let known: BTreeSet<_> = CODES.iter().map(|(code, ..)| *code).collect();
    assert_eq!(known, expected);
    assert_eq!(known.len(), CODES.len(), "a code has two rows");
}

/// Verifies A29.
#[test]
fn documented_table_equals_the_table_in_code() {
    let mut kinds: Vec<(ErrorClass, Refused, Vec<String>)> = Vec::new();
    for (code, class, refused) in CODES {
        let code = format!("`{code}`");
        match kinds.iter_mut().find(|kind| (kind.0, kind.1) == (class, refused)) {
            Some((.., codes)) => codes.push(code),
            Option::None => kinds.push((class, refused, vec![code])),
        }
    }
    let rows: String = kinds
        .iter()
        .map(|(class, refused, codes)| {
            let refused = match refused {
                None => "",
                Offering => "the offering",
                Type => "its type",
                Zone => "its zone",
                Market => "its market",
                Refused::Quota => "its quota",
                All => "all offerings",
            };
            format!("| {class:?} | {refused} | {} |\n", codes.join(", "))
        })
        .collect();
    let document = include_str!("../../../../../docs/ec2.md");
    assert!(document.contains(&rows), "docs/ec2.md lacks the table:\n{rows}");
}

#[test]
fn unknown_codes_and_lost_answers_are_classed_by_their_possible_effect() {
    assert_eq!(class(refused("Unheard")).0, Invalid);
    assert_eq!(class(failed("Unheard")).0, Unanswered);
    assert_eq!(class(Failure::NotSent("refused".into())).0, Transient);
    for unknown in [
        Failure::Unanswered("reset".into()),
        Failure::TooSlow(Duration::from_secs(1)),
        Failure::Incomplete("instance"),
    ] {
        assert_eq!(class(unknown).0, Unanswered);
    }
}

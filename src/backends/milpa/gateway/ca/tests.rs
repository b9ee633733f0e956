use x509_parser::prelude::X509Certificate;

use super::*;

fn request(change: impl FnOnce(&mut CertificateParams)) -> (KeyPair, Vec<u8>) {
    let key = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
    let mut params = CertificateParams::default();
    change(&mut params);
    let der = params.serialize_request(&key).unwrap().der().to_vec();
    (key, der)
}

#[test]
fn certificate_ignores_names_and_usages_of_the_request() {
    let ca = Ca::new().unwrap();
    let (key, der) = request(|params| {
        params.distinguished_name.push(DnType::CommonName, "gateway.kiyot.internal");
        params.subject_alt_names =
            CertificateParams::new([alpn::GATEWAY_NAME.to_owned()]).unwrap().subject_alt_names;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    });
    let cell = CellId::mint().unwrap();
    let proven = ProvenKey::from_request(&der).unwrap();
    let certificate =
        ca.certify(SystemTime::now(), &cell, &proven, CELL_CERTIFICATE_LIFETIME).unwrap();
    let read = Certificate::read(&certificate).unwrap();
    assert_eq!(read.common_name, cell.as_str());
    assert_eq!(read.key_sha256, proven.sha256());
    assert_eq!(read.key_sha256, sha256(&key.subject_public_key_info()));
    assert!(
        read.not_before == NOT_BEFORE
            && read.not_after
                > SystemTime::now() + CELL_CERTIFICATE_LIFETIME - Duration::from_secs(3600)
    );
    let (_, parsed) = X509Certificate::from_der(&certificate).unwrap();
    let usages = parsed.extended_key_usage().unwrap().unwrap().value;
    assert!(usages.client_auth && !usages.server_auth && !usages.any);
    assert!(parsed.subject_alternative_name().unwrap().is_none());
    assert!(!parsed.is_ca());
}

#[test]
fn request_without_proof_of_possession_is_refused() {
    let (_, der) = request(|_| {});
    assert!(ProvenKey::from_request(&der).is_ok());
    let mut forged = der.clone();
    *forged.last_mut().unwrap() ^= 1;
    assert!(ProvenKey::from_request(&forged).is_err());
    assert!(ProvenKey::from_request(&[der.as_slice(), b"more"].concat()).is_err());
    assert!(ProvenKey::from_request(b"").is_err());
    for cut in [1, der.len() / 2, der.len() - 1] {
        assert!(ProvenKey::from_request(&der[..cut]).is_err());
    }
    let other = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P384_SHA384).unwrap();
    let der = CertificateParams::default().serialize_request(&other).unwrap().der().to_vec();
    assert_eq!(
        ProvenKey::from_request(&der).unwrap_err(),
        InvalidRequest("key algorithm is neither ECDSA P-256 nor Ed25519")
    );
}

#[test]
fn authority_restored_from_its_record_is_the_same() {
    let (ca, record) = Ca::create().unwrap();
    let restored = Ca::from_record(record).unwrap();
    assert_eq!(restored.sha256(), ca.sha256());
    assert!(restored.gateway_identity().is_ok());
    assert!(Ca::from_record(CertificateAuthority::default()).is_err());
}
